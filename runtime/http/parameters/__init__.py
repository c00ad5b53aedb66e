"""What a generation request may ask for: every parameter declared once, read and checked."""
