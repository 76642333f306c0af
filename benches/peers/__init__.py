"""Managers that kvfolio is measured beside."""
