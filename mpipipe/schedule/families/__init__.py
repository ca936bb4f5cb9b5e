"""The families of schedules, a file each: a generator is a pure function of p, v, m and the family's options."""
