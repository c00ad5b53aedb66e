"""From the name of a model to a directory that engines load."""
