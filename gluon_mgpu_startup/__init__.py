"""What runs before the package itself: the import hook that Python starts with, and the command."""
