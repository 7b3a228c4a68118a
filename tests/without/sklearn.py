"""In place of scikit-learn, which `import mxnet` loads where it is installed, and needs a second for."""

raise ModuleNotFoundError("scikit-learn is left out of this process: see tests/conftest.py", name=__name__)
