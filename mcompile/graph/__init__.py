"""Graph level: passes, memory layout, fusion, partition into tasks, memory plan."""
