"""What operators of a federation use: trying one out, checks before a run, status, backups, and copies for auditors."""
