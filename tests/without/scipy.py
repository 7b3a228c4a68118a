"""In place of SciPy, which `import mxnet` loads where it is installed."""

raise ModuleNotFoundError("SciPy is left out of this process: see tests/conftest.py", name=__name__)
