"""Foreign engines: a hint goes in, a receipt comes out. One file for each engine; none knows another."""
