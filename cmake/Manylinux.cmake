# For wheels: libraries without symbols that came after glibc 2.28 and GCC 8, the platform manylinux_2_28. It links
# its own copies of what it would take from newer libraries: cmake/manylinux_2_28.cpp, and from libstdc++ the objects of
# std::condition_variable, of std::from_chars for floating-point numbers, of paths and of string streams. auditwheel checks
# the result (make wheel).
function(posembed_link_for_manylinux)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.a
                  OUTPUT_VARIABLE libstdcxx OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(objects condition_variable.o floating_from_chars.o fs_path.o memory_resource.o sstream-inst.o)
  list(TRANSFORM objects PREPEND ${PROJECT_BINARY_DIR}/ OUTPUT_VARIABLE extracted)
  add_custom_command(OUTPUT ${extracted}
    COMMAND ${CMAKE_AR} x ${libstdcxx} ${objects} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
  set_source_files_properties(${extracted} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  add_library(posembed_manylinux STATIC ${PROJECT_SOURCE_DIR}/cmake/manylinux_2_28.cpp ${extracted})
  target_compile_options(posembed_manylinux PRIVATE -fno-builtin)
  target_link_libraries(posembed_kernels_shared PRIVATE posembed_manylinux)
  target_link_libraries(posembed PRIVATE posembed_manylinux)
  if(TARGET posembed_python)
    target_link_libraries(posembed_python PRIVATE posembed_manylinux)
    target_link_options(posembed_python PRIVATE -Wl,--exclude-libs,ALL)
  endif()
endfunction()
