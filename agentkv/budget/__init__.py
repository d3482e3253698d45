"""What a task may spend, what it spent, and its bill."""
