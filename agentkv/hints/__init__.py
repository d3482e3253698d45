"""What is about to happen: hints are delivered, waits are learnt and forecast."""
