"""The checks: one function for each requirement, `<group>_<number>_<words>`, in a file for each subject."""
