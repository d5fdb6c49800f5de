"""What a policy would do on a machine: the real scheduler on a virtual clock and a cost model."""
