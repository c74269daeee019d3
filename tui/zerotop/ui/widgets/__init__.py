"""Widgets that draw rows of styled text themselves. Knows no screen."""
