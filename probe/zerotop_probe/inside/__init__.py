"""The probe inside every training rank. Standard library only, Python 3.9 and newer."""
