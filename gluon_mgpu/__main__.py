"""python -m gluon_mgpu: the command gluon-mgpu."""

from gluon_mgpu_command import main

if __name__ == "__main__":
    main()
