"""Evidence of what was released: ledger, certificate, statement, signatures, and their verification."""
