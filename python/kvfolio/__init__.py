"""kvfolio."""
