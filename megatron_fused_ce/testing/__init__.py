"""The toolbox that tests and scripts share: the plain definition, its inputs, and measuring tools."""
