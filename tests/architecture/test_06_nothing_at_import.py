"""Absence 6: nothing is opened or read from the environment at import; one composition root per process.

Whoever imports a module must not thereby read a file, the clock or a variable: tests could not choose them,
and the order of imports would decide what runs. Every setting is `ESPALIER_*`, in a class that the root
builds.
"""

import ast
from collections.abc import Iterator

from tests.architecture.sources import Source, called, calls, findings, last_name, report, source, stale

# Functions that only build a value. Classes (CapWords) do too, unless they are named below.
VALUE_MAKERS = frozenset(
    """auto bool bytes cast cache chr compile count dataclass dict encode enumerate field fields float format
    frozenset get getLogger get_args get_logger get_origin int items itemgetter join keys len list lru_cache
    maketrans map max min namedtuple object_schema ord partial
    range removeprefix replace reversed set sorted split str
    strip sum timedelta tuple values wraps zip contextmanager asynccontextmanager final override overload
    runtime_checkable unique field_validator model_validator field_serializer model_serializer
    total_ordering
    calls completes tool""".split()  # of the conformance kit: entries of a behaviour script
)
# A tree of commands is put together at import; the functions on it run later.
COMMAND_TREE = frozenset("command callback add_typer app_groups".split())
OPENERS = (
    "Settings",
    "Client",
    "Connection",
    "Engine",
    "Event",
    "FastAPI",
    "Lock",
    "Pool",
    "Popen",
    "Queue",
    "Redis",
    "Semaphore",
    "Server",
    "TaskGroup",
    "Worker",
)

ENVIRONMENT = frozenset(("environ", "environb", "getenv", "putenv", "load_dotenv"))
# Who may touch the environment inside a function, and why.
ENVIRONMENT_READERS: dict[str, str] = {
    "local/runtime.py": "children get the launcher's environment plus their own settings",
    "mcp_broker/stdio.py": "a server's program gets the few variables that every program needs",
    "local/git_repository.py": "git is configured by variables too; it gets those and no other",
    "client/commands/mcp_servers.py": "a server's bearer is in the variable that its user names",
    "local/up.py": "NO_COLOR is every terminal program's, not a setting of ours",
}
# Files that a process starts from: the only ones that build settings.
COMPOSITION_ROOTS = (
    "gateway/app.py",
    "gateway/main.py",
    "gateway/__main__.py",
    "mcp_broker/__main__.py",
    "run_worker/main.py",
    "run_worker/__main__.py",
    "store/migrations/env.py",
    "local/",
)
# alembic executes its environment as a script.
SCRIPTS = ("store/migrations/env.py",)


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in {
        last_name(each) for each in ast.walk(node.test) if isinstance(each, ast.Name)
    }


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs when the module is imported: not the bodies of functions, but their decorators."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and is_main_guard(child):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            outside = [*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)]
            for each in outside:
                yield from (each, *at_import(each))
        elif isinstance(child, ast.Lambda):
            continue
        else:
            yield from (child, *at_import(child))


def builds_a_value(name: str, local: set[str]) -> bool:
    if name in VALUE_MAKERS | COMMAND_TREE or name in local:
        return True
    plain = name.lstrip("_")
    return plain[:1].isupper() and not plain.endswith(OPENERS) and not plain.isupper()


def pure_names(module: Source) -> set[str]:
    """Functions that the module defines or takes from the two pure floors."""
    taken = {
        alias.asname or alias.name
        for node in module.tree.body
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(("espalier_protocol", "espalier_domain"))
        for alias in node.names
    }
    # A function of this module may be called at import if nothing in it would be a finding outside one.
    return taken | {
        node.name
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef)
        and all(builds_a_value(called(each), taken) for each, _ in calls(node))
    }


def opened_at_import(module: Source) -> Iterator[str]:
    if module.name in SCRIPTS:
        return
    escape = "build it in main or app and pass it down; a packaged file is read in a cached function"
    local = pure_names(module)
    for node in at_import(module.tree):
        if isinstance(node, ast.Call) and not builds_a_value(called(node), local):
            yield module.finding(node, f"{called(node) or 'something'}() runs at import", escape)
        if isinstance(node, ast.Attribute | ast.Name) and last_name(node) in ENVIRONMENT:
            yield module.finding(node, "the environment is read at import", escape)


def environment_anywhere(module: Source) -> Iterator[str]:
    escape = "make it a field of a settings class (ESPALIER_*) and pass the value down"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name) and last_name(node) in ENVIRONMENT:
            yield module.finding(node, f"{module.name} reads the environment by hand", escape)


def environment_read(module: Source) -> Iterator[str]:
    return iter(()) if module.name in ENVIRONMENT_READERS else environment_anywhere(module)


def settings_built_below_the_root(module: Source) -> Iterator[str]:
    """Also a `__main__` guard is a root: it runs only when the module is the process."""
    if module.name.startswith(COMPOSITION_ROOTS):
        return
    guards = [node for node in module.tree.body if is_main_guard(node)]
    guarded = {id(call) for guard in guards for call, _ in calls(guard)}
    for call, name in calls(module.tree):
        if name.endswith("Settings") and id(call) not in guarded:
            yield module.finding(
                call, f"{name} is built away from a composition root", "take the settings as a parameter"
            )


def settings_without_prefix(module: Source) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if not (
            isinstance(node, ast.ClassDef) and "BaseSettings" in {last_name(base) for base in node.bases}
        ):
            continue
        prefixes = [each for call, _ in calls(node) for each in call.keywords if each.arg == "env_prefix"]
        named = [
            isinstance(each.value, ast.Constant) and str(each.value.value).startswith("ESPALIER_")
            for each in prefixes
        ]
        if not named or not all(named):
            escape = 'model_config = SettingsConfigDict(env_prefix="ESPALIER_", ...)'
            yield module.finding(node, f"{node.name} reads variables that are not ours", escape)


def test_importing_a_module_opens_and_reads_nothing() -> None:
    found = findings(opened_at_import)
    assert not found, report(found)


def test_the_environment_is_read_by_settings_classes_alone() -> None:
    found = findings(environment_read)
    assert not found, report(found)


def test_every_listed_reader_of_the_environment_still_reads_it() -> None:
    assert stale(ENVIRONMENT_READERS, environment_anywhere) == [], "remove them from ENVIRONMENT_READERS"


def test_settings_are_built_in_composition_roots_alone() -> None:
    found = findings(settings_built_below_the_root)
    assert not found, report(found)


def test_every_setting_is_called_espalier() -> None:
    found = findings(settings_without_prefix)
    assert not found, report(found)


def test_the_rules_find_what_happens_at_import() -> None:
    bad = source(
        "store/bad.py",
        "SQL = Path(__file__).read_text()\nURL = os.environ['X']\nsettings = PoolSettings()\n"
        "async def f(pool=create_pool()): ...\nLOADED = _load()\ndef _load(): return open('x')\n",
    )
    assert len(list(opened_at_import(bad))) == 5
    assert len(list(environment_read(source("acts/bad.py", "def f(): return os.getenv('X')\n")))) == 1
    assert (
        len(list(settings_built_below_the_root(source("acts/bad.py", "def f(): return PoolSettings()\n"))))
        == 1
    )
    classes = (
        "class A(BaseSettings): ...\n"
        "class B(BaseSettings):\n    model_config = SettingsConfigDict(env_prefix='X_')\n"
    )
    assert len(list(settings_without_prefix(source("store/bad.py", classes)))) == 2


def test_the_rules_leave_values_alone() -> None:
    good = source(
        "store/good.py",
        "NAMES = frozenset(('a',))\nPATTERN = re.compile('x')\n@dataclass(frozen=True)\nclass Row: ...\n"
        "METHODS = {each.name: each for each in _table()}\ndef _table(): return [Method('a')]\n"
        "class S(BaseSettings):\n    model_config = SettingsConfigDict(env_prefix='ESPALIER_')\n"
        "def f(): return open('x')\nif __name__ == '__main__':\n    main()\n",
    )
    assert not list(opened_at_import(good))
    assert not list(settings_without_prefix(good))
