"""Privacy accounting: what releases cost, in closed form or by privacy loss distributions."""
