"""Which layouts of a model fit the GPUs, what each costs, and the plan as a table, JSON or Helm values."""
