"""Settings: schemas of all entry points, their composition, and the plan for this machine."""
