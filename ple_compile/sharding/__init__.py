"""Tables whose rows are split over the ranks of a process group, and how their lookups travel."""
