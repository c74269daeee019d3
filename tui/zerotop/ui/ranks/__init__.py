"""The Ranks screen: heatmap, outliers, one rank's details."""
