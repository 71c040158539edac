"""Early warning: forecasts of when a value inside the model will reach a limit of its format or of an op."""
