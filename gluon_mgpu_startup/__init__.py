"""Code that runs before the package: the import hook that Python starts with, and the command."""
