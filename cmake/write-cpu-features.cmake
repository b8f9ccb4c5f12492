# cmake -DOBJECT=cpu-features.c.o -DOUT=cpu-features.txt -P: the string in the object file, without running it, so that
# builds for other machines work as well.
file(STRINGS "${OBJECT}" found REGEX "kvedge-cpu-features: ")
string(REGEX REPLACE ".*kvedge-cpu-features: ([a-z0-9_ ]+).*" "\\1" found "${found}")
if(found STREQUAL "")
    message(FATAL_ERROR "${OBJECT} holds no list of CPU features")
endif()
file(WRITE "${OUT}" "${found}\n")
