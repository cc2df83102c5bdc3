"""`python -m espalier_run_worker`"""

from espalier_run_worker.main import main

if __name__ == "__main__":
    main()
