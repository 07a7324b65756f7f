# nlohmann/json, headers only, used inside libposembed and never by its users: the system's package, else the PyPI
# package of the building interpreter, else a download.
find_package(nlohmann_json 3.10 CONFIG QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  set(json_package "")
  if(POSEMBED_PYTHON)
    _posembed_package_of_python(${POSEMBED_PYTHON} nlohmann_json json_package)
  endif()
  if(EXISTS "${json_package}/include/nlohmann/json.hpp")
    add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
    target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${json_package}/include)
  else()
    include(FetchContent)
    FetchContent_Declare(nlohmann_json
      GIT_REPOSITORY https://github.com/nlohmann/json.git GIT_TAG v3.12.0 GIT_SHALLOW ON)
    set(JSON_SystemInclude ON)
    FetchContent_MakeAvailable(nlohmann_json)
  endif()
endif()
