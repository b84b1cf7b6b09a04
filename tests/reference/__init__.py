"""Slow float64 textbook versions in numpy, written from the equations. They share no code with what they check."""
