"""A federation of parties that do not trust each other: terms, the site's side, the coordinator's side."""
