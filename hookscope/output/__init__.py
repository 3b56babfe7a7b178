"""Results to files: directory, journal, manifest, a writer per format. Only this package writes."""
