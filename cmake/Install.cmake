# One set of rules fills /usr/local and the wheel: lib/, include/, lib/cmake/PosEmbed/, and for Python _C. A wheel for
# every torch has lib/torch2.11/, lib/torch2.13/, ... in place of lib/, but the kernels once, in lib/.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(posembed_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/PosEmbed)

# In a wheel torch lies beside posembed. Elsewhere it is where it was found; a relocatable package must not name that.
string(REGEX REPLACE "/torch[^/]*$" "" kernels_dir ${CMAKE_INSTALL_LIBDIR})
file(RELATIVE_PATH kernels_beside /posembed/${CMAKE_INSTALL_LIBDIR} /posembed/${kernels_dir})
file(RELATIVE_PATH torch_beside /posembed/${CMAKE_INSTALL_LIBDIR} /torch/lib)
set_target_properties(posembed PROPERTIES INSTALL_RPATH "$ORIGIN/${kernels_beside};$ORIGIN/${torch_beside}")
set(torch_hint "")
if(NOT POSEMBED_RELOCATABLE)
  set_property(TARGET posembed APPEND PROPERTY INSTALL_RPATH ${POSEMBED_TORCH_ROOT}/lib)
  set(torch_hint ${POSEMBED_TORCH_ROOT})
endif()

install(TARGETS posembed_kernels_shared EXPORT PosEmbedKernels
  LIBRARY DESTINATION ${kernels_dir} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS posembed EXPORT PosEmbedTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/csrc/include/ ${PROJECT_BINARY_DIR}/include/
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/PosEmbedConfig.cmake.in
  ${PROJECT_BINARY_DIR}/PosEmbedConfig.cmake INSTALL_DESTINATION ${posembed_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/PosEmbedConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT PosEmbedKernels NAMESPACE PosEmbed:: DESTINATION ${posembed_cmake_dir})
install(EXPORT PosEmbedTargets NAMESPACE PosEmbed:: DESTINATION ${posembed_cmake_dir})
install(FILES ${PROJECT_BINARY_DIR}/PosEmbedConfig.cmake ${PROJECT_BINARY_DIR}/PosEmbedConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake
  DESTINATION ${posembed_cmake_dir})

if(POSEMBED_PYTHON_MODULE OR POSEMBED_RELOCATABLE)
  # Read by the Python loader before it opens libposembed.so.
  configure_file(${PROJECT_SOURCE_DIR}/cmake/build.json.in ${PROJECT_BINARY_DIR}/build.json @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/build.json DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(POSEMBED_PYTHON_MODULE)
  set_target_properties(posembed_python PROPERTIES INSTALL_RPATH "$ORIGIN/${CMAKE_INSTALL_LIBDIR};$ORIGIN/../torch/lib")
  install(TARGETS posembed_python LIBRARY DESTINATION .)
endif()
