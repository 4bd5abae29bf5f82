"""Keep a run going, or end it with a reason: stalls, warnings, damaged samples, steps that are not finite."""
