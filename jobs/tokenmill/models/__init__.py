"""The architecture of a model, the presets with their recipes, and the numbers that neither contains."""
