"""Finds the calls of tools in generated text, as it comes: one module per format that models were trained on."""
