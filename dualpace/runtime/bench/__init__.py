"""What is asked of a server and how its answers are judged: workloads, metrics, plots."""
