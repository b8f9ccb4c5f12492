# The version, written in pyproject.toml alone.
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml KVEDGE_VERSION REGEX "^version = ")
string(REGEX REPLACE "^version = \"([0-9.]+)[^\"]*\".*" "\\1" KVEDGE_VERSION "${KVEDGE_VERSION}")
