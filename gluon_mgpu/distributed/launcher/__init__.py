"""Start, watch, restart and stop the processes of a job, on one machine or several."""
