"""What runs on the host: ISA and topology, paged attention. Knows nothing about requests."""
