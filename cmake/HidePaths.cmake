# A portable build travels: what it says of its source files (assertions, log lines) names no folder of the builder.

if(KVEDGE_PORTABLE AND NOT MSVC)
    # the last option that matches wins, and llama.cpp's tree lies below the build folder, which lies below the source
    foreach(folder IN ITEMS ${PROJECT_SOURCE_DIR}=kvedge ${PROJECT_BINARY_DIR}=build ${KVEDGE_LLAMA_DIR}=llama.cpp)
        add_compile_options(-ffile-prefix-map=${folder})
    endforeach()
endif()
