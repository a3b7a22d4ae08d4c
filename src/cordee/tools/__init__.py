"""What the command offers beside training: doctor, audit, chaos, export, join, scripts."""
