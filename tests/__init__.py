"""The tests, a package so that they can import what they share."""
