"""Incidents in words."""
