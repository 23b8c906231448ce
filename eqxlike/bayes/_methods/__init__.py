"""Methods of inference."""
