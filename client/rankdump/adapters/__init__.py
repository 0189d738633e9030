"""One package per framework; each imports the framework that is already there, never another."""
