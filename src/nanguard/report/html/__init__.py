"""The parts of the page that ``nanguard report`` writes."""
