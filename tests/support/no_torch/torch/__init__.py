"""Nothing of torch but what launchers ask for."""


class cuda:
    @staticmethod
    def is_available() -> bool:
        return False
