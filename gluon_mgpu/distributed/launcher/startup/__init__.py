"""What Python runs in every process of a job before the program: the folder is put into its `PYTHONPATH`."""
