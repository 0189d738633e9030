"""Removal of old iterations from dump trees by age and size."""
