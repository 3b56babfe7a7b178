"""`GradientMonitor` in other people's training loops: a module for each, which needs that package and loads it."""
