"""The Textual apps: timer, worker, navigation, settings. Screens have folders of their own."""
