"""The simulator: discrete events on a manual clock, driving the real policies over recorded or synthetic traces."""
