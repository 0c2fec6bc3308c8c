"""Audits: attacks on whole training runs, and the lower bounds on epsilon that follow from them."""
